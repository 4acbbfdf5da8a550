"""Without a GPU, Triton kernels run in Triton's interpreter: chosen before anything imports triton. Properties
have no deadlines: a busy machine is no counterexample."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("manylora", deadline=None)
settings.load_profile("manylora")
