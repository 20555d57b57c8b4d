import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # build.py, which the tests here share
