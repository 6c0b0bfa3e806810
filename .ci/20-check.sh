#!/usr/bin/env bash
set -euo pipefail
time make check
