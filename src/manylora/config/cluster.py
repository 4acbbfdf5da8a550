"""Declares the settings of a cluster: its processes, its router, its links and its limits."""

import dataclasses
import ipaddress
from typing import Annotated, Literal, NamedTuple

from manylora.config.declaring import GIVEN, ConfigError, Count, Section, check_rules, only, setting
from manylora.config.routing import RouterConfig, RouterName, split_setting
from manylora.rules import FINITE, Rule, at_least, between

MOST_REPLICAS = 1024
MOST_FRONTENDS = 64

Replicas = Annotated[int, between(1, MOST_REPLICAS)]
File = Annotated[str, Rule("a file's path", str.strip)]
_LEASE = "seconds that a replica may serve without word from the router, and after which it is given up"


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


class TlsFiles(NamedTuple):
    """The PEM files of this machine's certificate, its key, and the authorities that it trusts."""

    cert: str
    key: str
    ca: str


TLS_OPTIONS = ("--cluster-tls-cert", "--cluster-tls-key", "--cluster-tls-ca")


def tls_files(*paths: str | None) -> TlsFiles | None:
    """Return the three files, or None where none is given. Raises ConfigError where some are missing."""
    given = [path for path in paths if path is not None]
    if not given:
        return None
    if len(given) < len(paths):
        raise ConfigError(f"{', '.join(TLS_OPTIONS)} go together")
    return TlsFiles(*given)


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterOptions(Section):
    """The settings of a cluster. ``settings``: parameters of the routing policy, as texts of the form
    ROUTER.KEY=VALUE."""

    replicas: Replicas = setting(1, "engines, each a process with a pool of its own, behind one port")
    router: RouterName = setting("manylora", "what decides which replica serves a request", "NAME")
    settings: tuple[str, ...] = setting(
        (), "a parameter of the router; may be repeated", "ROUTER.KEY=VALUE", name="router_set"
    )
    launcher: Literal["local", "ray"] = setting(
        "local", "what starts replicas: processes of this machine, or Ray"
    )
    ray_address: str | None = setting(
        None,
        "Ray's cluster: auto, HOST:PORT, or local for one of its own (default: auto)",
        "ADDRESS",
        needs=("launcher", only("ray")),
    )
    insecure_ray: bool = setting(
        False,
        "use a Ray off this machine that does not ask for a token, and so runs what anyone sends",
        needs=("launcher", only("ray")),
    )
    cluster_host: Annotated[str, Rule("an address of this machine, not all of them", _is_address)] = setting(
        "127.0.0.1",
        "the address of this machine by which replicas and front ends on others reach it",
        "ADDRESS",
    )
    cluster_port: Annotated[int, between(0, 65535)] = setting(
        0, "the port of the router, for front ends that join; 0 for any"
    )
    cluster_tls_cert: File | None = setting(
        None,
        "encrypt links between the cluster's processes: this machine's certificate, for the address by which "
        "others reach it",
        "FILE",
    )
    cluster_tls_key: File | None = setting(None, "its key, which only its owner may read", "FILE")
    cluster_tls_ca: File | None = setting(
        None, "authorities: the other side of a link must have a certificate of theirs", "FILE"
    )
    adapter_cache: Annotated[str, Rule("a folder's path", str.strip)] | None = setting(
        None,
        "a folder on each machine, for its replicas alone, into which they copy adapters' files from the router's "
        "machine; without it they read them where they lie",
        "DIR",
    )
    adapter_cache_size: Count | None = setting(
        None,
        "most that --adapter-cache takes of a machine's disk (default: 50GiB)",
        is_size=True,
        needs=("adapter_cache", GIVEN),
    )
    frontends: Annotated[int, between(1, MOST_FRONTENDS)] = setting(
        1, "processes that speak HTTP, on one port"
    )
    min_replicas: Replicas | None = setting(None, "never fewer replicas (default: as --replicas)")
    max_replicas: Replicas | None = setting(None, "never more replicas (default: as --replicas)")
    autoscale: Literal["off", "hint", "on"] = setting(
        "off", "whether the number of replicas follows the load; hint only says what it should be"
    )
    max_attempts: Count = setting(3, "times that a request is tried before it is given up")
    queue_timeout: Annotated[float, at_least(1), FINITE] = setting(
        30.0, "seconds that a request waits for a replica that can hold it, where none is up"
    )
    lease: Annotated[float, at_least(1), FINITE] = setting(5.0, _LEASE)
    replicas_per_gpu: Annotated[int, between(1, 64)] = setting(1, "replicas that share a GPU")
    cluster_dir: Annotated[str, Rule("a folder's path", str.strip)] | None = setting(
        None,
        "the cluster's folder: secret, registry of adapters, admin socket; what is in it outlives the cluster "
        "(default: one for this user and port, which goes with the cluster)",
        "DIR",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        low, high = self.bounds
        if low > high:
            raise ConfigError(f"--min-replicas {low} is above --max-replicas {high}")
        if self.replicas > high:
            raise ConfigError(f"--replicas {self.replicas} is above --max-replicas {high}")
        self.router_config()
        _ = self.tls

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files; None: links are not encrypted. Raises ConfigError."""
        return tls_files(self.cluster_tls_cert, self.cluster_tls_key, self.cluster_tls_ca)

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas that there may be."""
        low = self.min_replicas or min(self.replicas, self.max_replicas or self.replicas)
        return low, self.max_replicas or max(self.replicas, low)

    @property
    def silence_s(self) -> float:
        """The silence, in seconds, after which a link ends: later than the router gives a silent replica up."""
        return self.lease + 1.0

    @property
    def num_at_start(self) -> int:
        """The number of replicas that are started first."""
        return max(self.replicas, self.bounds[0])

    def router_config(self) -> RouterConfig:
        """Build the router's own settings. Raises ConfigError."""
        pairs = []
        for text in self.settings:
            router, key, value = split_setting(text)
            if router != self.router:
                raise ConfigError(f"--router-set {text} is not of --router {self.router}")
            pairs.append((key, value))
        return RouterConfig(
            policy=self.router,
            settings=tuple(pairs),
            suspect_s=0.6 * self.lease,
            lease_s=self.lease,
            tick_s=min(0.5, self.lease / 10),
            max_attempts=self.max_attempts,
            queue_timeout_s=self.queue_timeout,
            trace=True,
        )
