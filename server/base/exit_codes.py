"""How the command ends, for service managers and scripts. Never 0 after a crash.

| code | when |
|---|---|
| 0 | a signal stopped the server: what was in flight has finished, or was told why not; also a stop while loading |
| 1 | the engine or the API processes failed for good, the address could not be bound, or what hung at the end was cut |
| 2 | a wrong flag or setting |
| 3 | the model could not be loaded |
| 130, 143 | a second SIGINT or SIGTERM cut the drain short (128 + the signal), or a client command was interrupted |
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MODEL = 3
EXIT_INTERRUPTED = 130
EXIT_BY_SIGNAL = 128
"""Plus the signal's number."""

HELP = (
    "exit codes: 0 stopped by a signal after draining; 1 failed, or cut because something hung; 2 wrong flag or "
    "setting; 3 model not loadable; 130 or 143 a second SIGINT or SIGTERM cut the drain short"
)
