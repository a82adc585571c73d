"""The two errors that a user can cause and mend; their text says what, where, what is allowed and what to do next."""


class ConfigError(Exception):
    """A recipe, an override or a setting that cannot work. Scripts print it and exit with code 2."""


class DataError(Exception):
    """Input data that cannot be used: the message names the file, the line or row, and the reason."""
