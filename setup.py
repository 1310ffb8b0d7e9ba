"""Builds the C++ kernels while the package is installed; an installation without a compiler succeeds and uses torch operations."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("functrain/kernels")
spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / FOLDER / "build.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


class BuildKernels(build_ext):
    """Makes the shared library, which is no Python module: it has a plain name and knows nothing of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """The name has no tag of Python's version and platform."""
        return "/".join(fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile where a compiler can; else say so and go on."""
        try:
            kernels.build(Path(self.get_ext_fullpath(ext.name)))
        except kernels.BuildError as error:
            self.warn(f"C++ kernels were not built, functrain will use torch operations: {error}")


class AnyPythonWheel(bdist_wheel):
    """The wheel depends on the platform, not on Python's version."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, no ABI, this platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "functrain.kernels." + kernels.LIBRARY.removesuffix(".so"),
            sources=[str(path) for path in sorted(FOLDER.glob("*.cpp"))],
            depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
