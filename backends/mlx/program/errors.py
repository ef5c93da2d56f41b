"""The one error of this package."""


class ProgramError(ValueError):
    """A delegate payload is not a program that can be run: damaged, of another version, or inconsistent."""
