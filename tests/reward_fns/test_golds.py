"""validate_golds and `trl-grpo-plus check-data`."""

import json

import pytest

from reward_fns import validate_golds
from trl_grpo_plus.cli import main

ROWS = [
    {"question": "?", "answer": r"\frac{1}{2}"},
    {"question": "?", "answer": ""},
    {"question": "?", "answer": "... #### 1,250"},
    {"question": "?", "answer": "8,12"},
    {"question": "?", "answer": r"\triangle ABC"},
    {"question": "?", "answer": r"\text{Evelyn}"},
]


def test_rows():
    report = validate_golds(ROWS)
    assert [row.status for row in report.rows] == ["ok", "unreadable", "ok", "ambiguous", "symbolic", "ok"]
    assert [row.kind for row in report.rows] == ["number", "none", "number", "list", "number", "word"]
    assert [row.read for row in report.rows][:3] == [r"\frac{1}{2}", None, "1,250"]
    assert [row.method for row in report.rows][:3] == ["bare", "none", "####"]
    assert report.counts == {"ok": 3, "unreadable": 1, "ambiguous": 1, "symbolic": 1}
    assert not report.ok and len(report) == 6
    assert "1 unreadable" in str(report) and "row 3: ambiguous" in str(report)


def test_sources():
    datasets = pytest.importorskip("datasets")
    assert validate_golds(datasets.Dataset.from_list(ROWS)).counts["ok"] == 3
    assert validate_golds(["1", 2, 0.5, ["3", "4"]]).ok
    assert validate_golds(ROWS, limit=1).counts == {"ok": 1}
    assert validate_golds([{"target": "1"}], column="target").ok
    with pytest.raises(ValueError, match="no gold column"):
        validate_golds([{"target": "1"}])
    with pytest.raises(ValueError, match="pass dataset"):
        validate_golds(datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)))


def test_prose_without_a_marked_answer_is_ambiguous():
    row = validate_golds(["She sold 48 clips in April and then half as many, 24 clips, in May, 72 in all"]).rows[0]
    assert (row.status, row.method) == ("ambiguous", "prose")


def test_a_contradiction_is_ambiguous():
    assert validate_golds(["1 = 7"]).rows[0].status == "ambiguous"


def test_command(tmp_path, capsys):
    path = tmp_path / "golds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["check-data", str(path)]) == 1
    out = capsys.readouterr().out
    assert "6 golds from answer" in out and "1 unreadable" in out and "Next:" in out
    path.write_text(json.dumps(ROWS[0]) + "\n")
    assert main(["check-data", str(path), "--all"]) == 0


@pytest.mark.parametrize("argv", [["missing.jsonl"], ["PATH", "--column", "target"]])
def test_user_errors_are_one_line(argv, tmp_path, capsys):
    path = tmp_path / "golds.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    assert main(["check-data", *[str(path) if word == "PATH" else word for word in argv]]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("check-data: ") and "\n" not in error


def test_math_and_gsm8k_can_be_read(shared_data):
    for name, rows in (("gsm8k/test.jsonl", 1319), ("math/test.jsonl", 5000)):
        with open(shared_data(name)) as file:
            report = validate_golds([json.loads(line) for line in file], column="answer")
        assert len(report) == rows and report.ok
        assert report.counts["ok"] > 0.99 * rows
