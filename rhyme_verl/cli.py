"""The `rhyme` command: registers the subcommands."""

import typer

from rhyme_verl.commands.doctor.command import doctor
from rhyme_verl.commands.history import app as history
from rhyme_verl.commands.report.command import report
from rhyme_verl.commands.simulate import simulate
from rhyme_verl.commands.verify.command import verify

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Tools of rhyme_verl.", rich_markup_mode="markdown")
for command in (report, doctor, verify, simulate):
    app.command()(command)
app.add_typer(history, name="history")

if __name__ == "__main__":
    app()
