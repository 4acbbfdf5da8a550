"""dLoRA's programme, solved: the only place that names highspy.

Knows the programme as numbers (``protocol.routing.Solve``), and neither the router that asks nor what becomes
of the answer.
"""
