"""Where tests find what they share: the bench for conversations, the statistics of noise, and compiled loops."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

for folder in (".", "conversations", "privacy", "storage", "secagg"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# A shell starts what runs in the background without interrupts, and the processes that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Loops that XLA has compiled are kept for the other processes and for the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# XLA compiles for this run and not for speed, in a fifth of the time. `make test-all` sets XLA_FLAGS to nothing, and
# runs the simulator, the models and the mechanisms once more as users have them compiled.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false",
)

# As many examples as find what they are for in seconds; CROWDML_EXAMPLES=1000 for a night.
# Without a deadline: no test needs a quiet machine.
settings.register_profile("ours", max_examples=int(os.environ.get("CROWDML_EXAMPLES", "40")), deadline=None)
settings.load_profile("ours")


@pytest.fixture(scope="session", autouse=True)
def alembics_upgrade() -> Any:
    """Alembic's own upgrade. In the tests a new SQLite database repeats what the first one of the process ended with:
    Alembic takes ten times as long, and the tests open hundreds of databases. Others are migrated as ever.
    """
    if "crowdml.storage.server.database" not in sys.modules:
        return None
    from alembic import command

    migrate, whole = command.upgrade, list[str]()

    def upgrade(config: Any, revision: str) -> None:
        connection = config.attributes["connection"]
        is_new = (
            connection.dialect.name == "sqlite"
            and not connection.exec_driver_sql("select count(*) from sqlite_master").scalar()
        )
        if not (is_new and whole):
            migrate(config, revision)
        if is_new and not whole:
            dump = connection.connection.driver_connection.iterdump()
            whole.extend(
                re.sub(r"X'[0-9A-F]{64}'", "randomblob(32)", statement)  # each database has keys of its own
                for statement in dump
                if statement not in ("BEGIN TRANSACTION;", "COMMIT;")
            )
        elif is_new:
            for statement in whole:
                connection.exec_driver_sql(statement)

    command.upgrade = upgrade
    return migrate
