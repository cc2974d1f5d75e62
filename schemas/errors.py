"""The root of every error that `schemas` raises."""


class SchemaError(Exception):
    """Something that crosses a process boundary is not what its contract says.

    The message names the thing, the place and the remedy; it is fit to be shown to a user.
    """


class UnknownTopicError(SchemaError):
    """A topic name that is none of Klaxon's."""


class EncodingError(SchemaError):
    """A whole record cannot be read: wrong content type, broken envelope, lengths that disagree."""
