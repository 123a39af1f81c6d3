import torch

from tests.parity.poison import poisoned  # noqa: F401

torch.set_num_threads(1)
