"""Every Python block of the README runs as written."""

import contextlib
import io
import re
from pathlib import Path

import functrain as ft

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_learns(tmp_path: Path) -> None:
    block, more = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    file = tmp_path / "example.py"  # a real file: errors and graphs name its lines
    file.write_text(block)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        scope = {"__name__": "example"}
        exec(compile(block, str(file), "exec"), scope)
    found = re.fullmatch(r"loss (\d\.\d+) captured \(eager\)\n", printed.getvalue())
    assert found is not None, printed.getvalue()
    assert float(found[1]) < 0.2
    assert len(block.strip().splitlines()) <= 30
    with contextlib.redirect_stdout(printed):
        exec(compile(more, str(file), "exec"), scope)
    assert "Array([64, 2], float32, P('data') on data=4 (virtual))" in printed.getvalue()
    assert "reduce_scatter[data]" in printed.getvalue()


def test_the_plan_can_be_read() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    plan = ft.Plan.of_toml(block, simulate=True)
    assert (plan.mesh.shape, plan.zeros[0].stage, plan.batch) == ({"data": 2}, 2, ft.P("data"))
