"""Help that stays readable at 80 columns: plain text, options in titled groups, names and variables never cut."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

_NAME_COLUMNS = 28
_OTHER = "Options"


class HelpfulCommand(TyperCommand):
    """A command whose options are listed under the titles of their `rich_help_panel`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as everybody writes them: SOURCE..., where newer releases of typer write {SOURCE}...."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then each group of options, into `formatter`."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], _OTHER: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_argument = parameter.param_type_name == "argument"
            title = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or _OTHER
            if is_argument:
                # Releases of typer that show a type write it as Python does: SOURCE <list[str]>.
                record = (record[0].partition(" <")[0], record[1])
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=_NAME_COLUMNS)


class HelpfulGroup(TyperGroup):
    """A group that gives each command's whole first sentence, not as much as fits one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands into `formatter`."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, (command.help or "").strip()) for name, command in commands if command])
