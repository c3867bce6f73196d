"""Every notebook runs from top to bottom, and its .ipynb is the stripped pair of its .py."""

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))
EACH_NOTEBOOK = pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_are_notebooks():
    assert NOTEBOOKS
    assert (
        sorted(path.with_suffix(".py") for path in NOTEBOOKS[0].parent.glob("*.ipynb")) == NOTEBOOKS
    )


@EACH_NOTEBOOK
def test_pair_is_in_step_and_stripped(script):
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert cells(notebook) == cells(jupytext.read(script)), (
        f"{script.name} and its .ipynb differ: run jupytext --to ipynb notebooks/{script.name}"
    )
    for cell in notebook.cells:
        assert not cell.get("outputs"), (
            f"{script.stem}.ipynb has output; write it anew from the .py"
        )
        assert cell.get("execution_count") is None


@EACH_NOTEBOOK
def test_notebook_runs(script):
    NotebookClient(
        jupytext.read(script),
        timeout=60,
        kernel_name="python3",
        resources={"metadata": {"path": str(script.parent)}},
    ).execute()
