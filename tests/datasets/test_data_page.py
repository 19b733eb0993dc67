"""docs/data.md names every data set, with its sizes and terms."""

from __future__ import annotations

from pathlib import Path

from crowdml.datasets import catalogue

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_data_set_has_a_heading_with_its_terms_and_a_row_with_its_sizes():
    for info in catalogue():
        section = PAGE.partition(f"\n## {info.name}\n")[2].partition("\n## ")[0]
        assert "terms" in section.lower(), info.name
        devices, evaluation, public = info.rows
        row = f"| `{info.name}` | {devices:,} | {evaluation:,} | {public:,} | {info.features} | {info.classes} |"
        assert row in PAGE, row
