"""Settings in sections: what users set, what the policy is given. A section checks its values when it is made."""
