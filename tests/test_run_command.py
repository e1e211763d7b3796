"""``errors.run_command``: what a command leaves behind in the process."""

from __future__ import annotations

import logging

from hfseq.errors import run_command


def test_each_message_of_several_commands_is_printed_once(capsys):
    log = logging.getLogger("hfseq")
    before = log.handlers.copy(), log.level, log.propagate
    for number in range(3):
        run_command(lambda number=number: log.info("message %d", number), show_log=True)
    assert capsys.readouterr().err.splitlines() == ["message 0", "message 1", "message 2"]
    assert (log.handlers, log.level, log.propagate) == before
