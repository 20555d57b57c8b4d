import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # loops.py, which the tests here share


@pytest.fixture(autouse=True)
def same_numbers():
    """One thread and one seed, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
