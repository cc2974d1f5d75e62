"""A worker whose faults can be armed while it runs: `python -m tests.faults.armed KIND FOLDER [DEFECT]`.

SIGUSR1 arms what FOLDER/PID.armed says, as `KLAXON_FAULT` would. DEFECT: one of `tests.system.known_bad`.
Nothing else differs from `klaxon worker KIND`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pipeline.workers import faults

if __name__ == "__main__":
    kind, folder, *defect = sys.argv[1:]
    file = Path(folder) / f"{os.getpid()}.armed"
    signal.signal(signal.SIGUSR1, lambda *_: faults.arm(file.read_text()))
    if defect:
        from tests.system.known_bad import DEFECTS

        DEFECTS[defect[0]]()
    sys.argv = ["klaxon", "worker", kind]
    from pipeline.cli.main import main

    main()
