"""Run a script in an environment whose torchvision was built for another torch.

    python with_torchvision.py SCRIPT [ARGUMENT...]

Other libraries cannot import it there; `require_torchvision` makes it importable for them too.
"""

import runpy
import sys

from largebatch.optional import require_torchvision

if __name__ == "__main__":
    require_torchvision()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
