"""What is installed is what lies in the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_folder_of_code_and_the_recipes_are_installed():
    project = (ROOT / "pyproject.toml").read_text()  # tomllib came with Python 3.11, and we support 3.10
    listed = re.search(r"^packages = \[(.*?)\]", project, re.DOTALL | re.MULTILINE)
    folders = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "converter").rglob("__init__.py")}
    assert listed is not None
    assert set(re.findall(r'"(.+?)"', listed[1])) == folders | {"converter.recipes"}
    assert '"converter.recipes" = "recipes"' in project
    assert all(file.suffix == ".yaml" for file in (ROOT / "recipes").iterdir())
