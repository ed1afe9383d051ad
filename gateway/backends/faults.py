"""What can go wrong with a backend, told apart by what the relay may do about it."""

from __future__ import annotations

from math import ceil

from gateway.apis import Family
from worker.protocol.errors import ApiError, ErrorBody

UNKNOWN_MODEL = "backend_not_found"


class BackendFault(Exception):
    """A backend did not answer as it should. ``code`` goes into the usage row, ``message`` to the client.

    ``retryable``: another backend may do better. ``unreachable``: no connection could be made, so the endpoint is best
    left alone for a while. ``lost_early``: the connection broke before any byte of an answer came.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int = 502,
        retryable: bool = True,
        unreachable: bool = False,
        lost_early: bool = False,
        unhealthy: bool = True,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.retryable = retryable
        self.unreachable = unreachable
        self.lost_early = lost_early
        self.unhealthy = unhealthy
        self.retry_after_s = retry_after_s

    @property
    def outcome(self) -> str:
        """As ``code``, but one of few words whatever the backend says: for metrics."""
        return self.code

    @property
    def busy(self) -> bool:
        """It refused for want of capacity."""
        return self.retryable and not self.unhealthy and self.status in (429, 503)

    @property
    def unknown_model(self) -> bool:
        """It does not serve what it was asked for, which says nothing about other models."""
        return self.code == UNKNOWN_MODEL

    def error(self) -> ApiError:
        """What the client is told."""
        headers = {"retry-after": str(max(1, ceil(self.retry_after_s or 1)))} if self.status == 503 else None
        return ApiError(self.status, self.message, type="server_error", code=self.code, headers=headers)


def no_backend(model: str, wait_s: float | None = None) -> BackendFault:
    """``wait_s``: those that are up asked to be left alone for so long; None: none is up."""
    if wait_s is not None:
        return BackendFault(
            "backends_busy",
            f"All backends that serve the model {model!r} are busy. Try again in {max(1, ceil(wait_s))} s.",
            status=503,
            retryable=False,
            retry_after_s=wait_s,
        )
    return BackendFault(
        "no_backend_available",
        f"No worker that serves the model {model!r} is up at the moment. Try again shortly.",
        status=503,
        retryable=False,
    )


def unreachable() -> BackendFault:
    return BackendFault(
        "no_backend_available", "No worker could be reached. Try again shortly.", status=503, unreachable=True
    )


def disconnected(*, early: bool = False) -> BackendFault:
    return BackendFault(
        "backend_disconnected",
        "The worker broke off before the answer was complete. Send the request again.",
        lost_early=early,
    )


def malformed(what: str) -> BackendFault:
    """``what`` the worker did, as a clause: "sent a line that is too long"."""
    return BackendFault("backend_protocol_error", f"The worker {what}. Send the request again.")


def silent(seconds: float) -> BackendFault:
    return BackendFault(
        "backend_timeout", f"The worker was silent for {seconds:g} s. Send the request again.", status=504
    )


def out_of_time(seconds: float) -> BackendFault:
    return BackendFault(
        "request_timeout",
        f"The answer was not complete within the {seconds:g} s that this model allows. Ask for less output.",
        status=504,
        retryable=False,
    )


class BackendError(BackendFault):
    """A backend answered with an error of its own that the client may read.

    ``body`` is the error as it stood in ``family``'s shape: a door of that family passes it on as it is. For the others
    ``told`` says the same.
    """

    def __init__(
        self,
        status: int,
        body: bytes,
        *,
        code: str,
        retryable: bool,
        retry_after: str | None = None,
        family: Family = "openai",
        told: ErrorBody | None = None,
        unhealthy: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(
            code,
            "the backend answered with an error",
            status=status,
            retryable=retryable,
            unhealthy=unhealthy,
            retry_after_s=retry_after_s,
        )
        self.body = body
        self.retry_after = retry_after
        self.family = family
        self.told = told

    @property
    def outcome(self) -> str:
        return f"status_{self.status}"

    def error(self) -> ApiError:
        return PassedOnError(self)


class PassedOnError(ApiError):
    """A backend's error, its bytes unchanged in ``family``'s shape."""

    def __init__(self, fault: BackendError) -> None:
        headers = {} if fault.retry_after is None else {"retry-after": fault.retry_after}
        told = fault.told or ErrorBody(
            fault.message, "server_error" if fault.status >= 500 else "invalid_request_error"
        )
        super().__init__(
            fault.status, told.message, type=told.type, param=told.param, code=told.code or fault.code, headers=headers
        )
        self.family = fault.family
        self.raw = fault.body

    def encode(self) -> bytes:
        return self.raw if self.family != "anthropic" else super().encode()
