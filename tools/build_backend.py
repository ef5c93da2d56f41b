"""setuptools' build backend, asking for ExecuTorch only where the target environment has none.

An isolated build cannot import the target environment's packages, but it can compile against its files; that saves
downloading ExecuTorch once more for each build.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import __all__ as __all__
from setuptools.build_meta import get_requires_for_build_wheel as _requires_for_wheel

_LIBRARY = "libexecutorch.dylib" if sys.platform == "darwin" else "libexecutorch.so"


def _executorch_requirement():
    installed = Path(sysconfig.get_path("purelib")) / "executorch" / "lib" / _LIBRARY
    return [] if installed.is_file() else ["executorch==1.5.1"]


def get_requires_for_build_wheel(config_settings=None):
    """As setuptools', and ExecuTorch where the target environment has none."""
    return _requires_for_wheel(config_settings) + _executorch_requirement()


def get_requires_for_build_editable(config_settings=None):
    """As for a wheel."""
    return get_requires_for_build_wheel(config_settings)
