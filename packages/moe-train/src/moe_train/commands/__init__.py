"""The commands of ``moe-train``, one a file. `table` lists them; nothing else imports them.

A command's module has ``main(argv) -> int``, and ``FLAGS``, the dataclasses whose fields are its
flags, by subcommand (``""`` if it has none), from which completions are made. Modules import what
they need at their top, so a command that computes nothing starts without torch.
"""
