"""The start of Python where this folder is on PYTHONPATH: the CPU rig of NxD Inference, with stand-ins.

The rig's processes inherit PYTHONPATH, so each has the stand-ins: pytest, engine processes, one worker for each rank.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
BEHIND = [place for place in sys.path if Path(place).resolve() != HERE.resolve()]
RIG = importlib.machinery.PathFinder.find_spec("sitecustomize", BEHIND)
if RIG is not None and RIG.loader is not None:
    RIG.loader.exec_module(importlib.util.module_from_spec(RIG))
if "_neuron_stub" in sys.modules:
    import rig_stand_ins

    rig_stand_ins.install()
