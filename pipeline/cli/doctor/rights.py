"""Who may do what on Kafka, against the table of rights."""

from __future__ import annotations

from pipeline.cli.doctor.broker import not_checked
from pipeline.cli.doctor.findings import Finding
from pipeline.config import Config
from pipeline.workers.acls import NoAuthorizerError, acl_problems
from pipeline.workers.broker import BrokerAwayError, BrokerError


async def right_findings(config: Config) -> list[Finding]:
    """Rights that are missing, or too many. Nothing where nobody logs in. Raises BrokerAwayError."""
    kafka = config.kafka
    if kafka.security == "plaintext":
        return []
    where = f"Kafka at {kafka.bootstrap}"
    try:
        problems = await acl_problems(config)
    except BrokerAwayError:
        raise
    except NoAuthorizerError:
        off = Finding(
            severity="warning",
            code="acls_off",
            where=where,
            what="no authorizer: whoever logs in may write directives",
            remedy="set authorizer.class.name on every node, then `klaxon topics create --acls`",
        )
        return [off]
    except BrokerError as error:
        return [not_checked(where, f"the rights granted: {error}")]
    return [
        Finding(
            severity="error" if one.missing else "warning",
            code="acls",
            where=where,
            what=one.what,
            remedy=one.remedy,
        )
        for one in problems
    ]
