"""Prints the requirements of the build and of the tests, without the frameworks, as pyproject.toml has them."""

from __future__ import annotations

from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]


def main() -> None:
    """The command line."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    print(*project["build-system"]["requires"], *project["project"]["optional-dependencies"]["test"], sep="\n")


if __name__ == "__main__":
    main()
