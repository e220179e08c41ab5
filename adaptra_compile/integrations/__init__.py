"""Ways into other training frameworks. Each module needs its framework, which importing adaptra never loads."""
