"""Build steps that pyproject.toml cannot express: the native part and the wire format's bindings."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
PACKAGE = "executorch_mlx"
LIBRARY = "libexecutorch.dylib" if sys.platform == "darwin" else "libexecutorch.so"


def find_executorch() -> Path:
    """Return the installed ExecuTorch package's folder: this environment's, else the build environment's."""
    roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    for root in roots:
        folder = Path(root) / "executorch"
        if (folder / "lib" / LIBRARY).is_file():
            return folder
    raise RuntimeError(
        "ExecuTorch is needed to build executorch-mlx and was not found in "
        + ", ".join(roots)
        + ": pip install 'executorch>=1.5.1,<1.6', or build with isolation (pip's default)"
    )


def load_schema_generator():
    """Import tools/generate_schema.py, which is no part of the installed package."""
    spec = importlib.util.spec_from_file_location("generate_schema", ROOT / "tools" / "generate_schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extension(name, *flags, **options):
    """Describe a native part of the runtime, in the limited API: one binary serves every Python."""
    return Extension(
        f"{PACKAGE}.backends.mlx.runtime._{name}",
        sources=[f"backends/mlx/csrc/{name}.cpp"],
        extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", *flags],
        py_limited_api=True,
        **options,
    )


TRAMPOLINE = extension(
    "trampoline", define_macros=[("C10_USING_CUSTOM_GENERATED_MACROS", None), ("ET_EVENT_TRACER_ENABLED", None)]
)
# macOS has a fast BLAS, which MLX uses by itself.
BLAS = [extension("blas")] if sys.platform == "linux" else []
# It chooses among instruction sets by itself when it is called. GCC on Linux needs -pthread for std::thread.
ATTENTION = extension("attention", "-O3", "-pthread", extra_link_args=["-pthread"])


class BuildAgainstExecuTorch(build_ext):
    """Generates the bindings, then compiles the trampoline against the ExecuTorch that is installed."""

    def build_extensions(self):
        """Add ExecuTorch's headers and library to the trampoline, then build."""
        executorch = find_executorch()
        self._write_schema(executorch)
        include = executorch / "include"
        TRAMPOLINE.include_dirs += [
            str(include),
            str(include / "executorch" / "runtime" / "core" / "portable_type" / "c10"),
        ]
        # Linked by path but found at run time: the package loads the library first.
        TRAMPOLINE.extra_objects.append(str(executorch / "lib" / LIBRARY))
        super().build_extensions()

    def _write_schema(self, executorch):
        source = executorch / "backends" / "mlx" / "serialization" / "schema.fbs"
        target = Path("backends/mlx/program/_schema.py")
        folder = ROOT if self.inplace or self.editable_mode else Path(self.build_lib) / PACKAGE
        text = load_schema_generator().generate(source.read_text())
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).write_text(text)


setup(
    # The repository's root is the package: backends/, extension/ and examples/ lie at the top, as in ExecuTorch.
    package_dir={PACKAGE: "."},
    packages=[
        f"{PACKAGE}.{name}"
        for name in find_namespace_packages(include=["backends*", "extension*", "examples*"])
        if not name.endswith("csrc")
    ],
    package_data={"": ["py.typed", "*.pyi"]},
    ext_modules=[TRAMPOLINE, *BLAS, ATTENTION],
    cmdclass={"build_ext": BuildAgainstExecuTorch},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
