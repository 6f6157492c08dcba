"""Secrets leave no report: values under secret-sounding keys, and values that look like a known kind of credential.

A report is made to be passed on, and the resolved configuration of a run may hold an API key of the logger. Better
one word too many hidden than one key shown; option names of this package (`action_key`, `token_budget`) are not hidden.
"""

from __future__ import annotations

import re
from typing import Any

REDACTED = "[redacted]"
"""What stands in a secret's place."""

_SECRET_KEY = re.compile(
    r"(password|passwd|passphrase|secret|credential|bearer|authorization"
    r"|(api|access|private|secret|ssh|auth|encryption|account)[_-]?key"
    r"|(^|[_.-])(token|pat|auth|jwt|cookie))$|(password|secret|credential|key_id)s$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\bwandb_v\d_[A-Za-z0-9_]{16,}"
    r"|\b[0-9a-f]{40}\b"  # a W&B key; also a commit hash, which nobody misses in a configuration
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\b(ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bA(KIA|SIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bxox[abprs]-[\w-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    re.DOTALL,
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_ASSIGNMENT = re.compile(
    r"(?P<key>[\w.-]*(?:password|passwd|secret|credential|(?:api|access|private|auth)[_-]?key|(?<![a-z])token))"
    r"(?P<sep>\s*[=:]\s*|\s+)(?P<value>[^\s'\"]{6,})",
    re.IGNORECASE,
)


def redact_text(text: str) -> str:
    """Replaces what looks like a credential within a text or a command line."""
    text = _SECRET_VALUE.sub(REDACTED, text)
    text = _URL_PASSWORD.sub(REDACTED, text)
    return _ASSIGNMENT.sub(rf"\g<key>\g<sep>{REDACTED}", text)


def redact(value: Any) -> Any:  # noqa: ANN401  plain values of any kind, as YAML gives them
    """Replaces secrets in nested plain values.

    Args:
        value: Mappings, sequences and scalars, such as a parsed YAML file.

    Returns:
        A copy in which every non-empty value under a secret-sounding key, and every text that looks like a
        credential, is `REDACTED`.
    """
    if isinstance(value, dict):
        return {
            key: REDACTED if _SECRET_KEY.search(str(key)) and item not in (None, "", False) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
