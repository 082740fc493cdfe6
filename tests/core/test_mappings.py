from __future__ import annotations

from bridge.core.mappings import mappings, parse_table, read_table, table_files


def test_every_row_knows_its_line() -> None:
    for path in [mappings() / "roles.toml", *table_files("arch")]:
        file = read_table(path)
        lines = path.read_text().splitlines()
        inner = {f"foreign.{name}": group for name, group in file.data.get("foreign", {}).items()}
        for section, group in ({**file.data, **inner}).items():
            whole = isinstance(group, dict) and not section.endswith(("_if", "_for", "foreign"))
            for key in (key for key in group if whole and not isinstance(group[key], dict)):
                place = file.place(section, key)
                assert lines[place.line - 1].strip() == place.row
                assert key in place.row


def test_the_same_key_in_two_sections_has_two_lines() -> None:
    file = parse_table('[a."x == 1"]\n"k" = 1\n[a."x == 2"]\n"k" = 2\n', "t.toml")
    assert (file.place('a."x == 1"', "k").line, file.place('a."x == 2"', "k").line) == (2, 4)
