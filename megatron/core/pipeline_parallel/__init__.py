"""Pipeline parallelism: schedules as data, and one executor that walks them."""
