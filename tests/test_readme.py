"""Every Python block of the README runs as written."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_learns(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    file = tmp_path / "example.py"  # a real file: errors and graphs name its lines
    file.write_text(block)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(file), "exec"), {"__name__": "example"})
    found = re.fullmatch(r"loss (\d\.\d+) captured \(eager\)\n", printed.getvalue())
    assert found is not None, printed.getvalue()
    assert float(found[1]) < 0.2
    assert len(block.strip().splitlines()) <= 30
