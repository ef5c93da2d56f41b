"""What can go wrong with a cache, by cause. A wrong argument is a plain ValueError or TypeError."""


class CacheError(RuntimeError):
    """A cache cannot do what was asked of it in the state it is in."""


class CacheFullError(CacheError):
    """A step needs more room than the cache has left; nothing was changed."""


class StepError(CacheError):
    """The step protocol was not followed: no step open, a verb inside a step, a step that does not fit."""


class CacheLostError(CacheError):
    """The device failed while it computed this cache's bytes; only ``clear()`` makes it usable again."""
