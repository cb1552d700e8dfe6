"""GPU kernels, each imported only where it runs: `import moa` needs neither Triton nor a GPU."""
