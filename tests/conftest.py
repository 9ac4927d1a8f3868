"""Set-up of every test: one thread a process, so that results and time do not depend on the machine's cores."""

import torch

torch.set_num_threads(1)
