"""From regions and schedules to kernel IR, from kernel IR to C and CUDA C++, and its interpreter."""
