"""The kernels, and the metadata that pyproject.toml leaves to the table of versions. requirements/ pins what is tested together."""

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE))

from csrc.build import NO_TORCH, BuildError, build  # noqa: E402  needs the line above
from megappo.runtime import versions  # noqa: E402  the same; it imports nothing

# Said before anything is built: pip shows it alone then, not below a page of what setuptools did.
if importlib.util.find_spec("torch") is None:
    raise SystemExit(f"megappo: {NO_TORCH}")


def listed(group: dict[str, str]) -> list[str]:
    return [name + specifier for name, specifier in group.items()]


class BuildKernels(build_ext):
    """Compiles csrc/ by csrc/build.py, which also says what is left out and why."""

    def get_ext_filename(self, fullname: str) -> str:
        # The library holds no Python ABI, so its name says nothing of a Python version.
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            print("megappo:", build(library, HERE / "build/kernels"))
        except BuildError as error:
            raise SystemExit(f"megappo: {error}") from None

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for ext in self.extensions:
            facts = Path(self.get_ext_filename(ext.name)).with_suffix(".json")
            shutil.copyfile(Path(self.build_lib, facts), HERE / facts)


class BuildPackage(build_py):
    """Adds the recipes, which `megappo config --recipe` prints: an installation has no repository beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree(str(HERE / "configs/recipes"), str(Path(self.build_lib) / "megappo/recipes"))


setup(
    ext_modules=[Extension("megappo._native", sources=[])],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    python_requires=versions.PYTHON,
    install_requires=listed(versions.REQUIRED),
    extras_require={name: listed(group) for name, group in versions.EXTRAS.items()},
)
