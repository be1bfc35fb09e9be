#!/usr/bin/env bash
# Installs what some tests need beyond Python, where it is missing and can be had: as root on
# Debian, with npm where there is one. With --all, also what only slow tests need. Tests whose tools
# are not there are skipped, so nothing here fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LIMIT=240 # seconds that one step may take

DEBIAN=(
    # kernels/
    g++
    # router/http/playground/
    chromium
    # docker/: promtool, and the Compose that Debian has
    docker-compose prometheus
    # router/http/: proxies in front of routers
    haproxy nginx-light
)
SLOW=(
    # clients/cpp
    cmake libgrpc++-dev pkg-config protobuf-compiler protobuf-compiler-grpc
    # clients/go
    golang-github-golang-protobuf-1-5-dev golang-go golang-google-grpc-dev make protoc-gen-go-1-5
    protoc-gen-go-grpc
    # clients/java
    libgeronimo-annotation-1.3-spec-java libgrpc-java libguava-java libnetty-java libperfmark-java
    libprotobuf-dev libprotobuf-java openjdk-17-jdk-headless protobuf-compiler-grpc-java-plugin
    # kernels/: those for other CPUs
    g++-aarch64-linux-gnu qemu-user
)
[ "${1:-}" != --all ] || DEBIAN+=("${SLOW[@]}")

missing() { # those of the given packages that are not installed
    comm -23 <(printf '%s\n' "$@" | sort) \
        <(dpkg-query --show --showformat '${db:Status-Status} ${Package}\n' |
            sed -n 's/^installed //p' | sort -u)
}

known() { # those of the given packages that this Debian has
    apt-cache show "$@" 2>/dev/null | sed -n 's/^Package: //p' | sort -u
}

install_debian() {
    command -v apt-get dpkg-query >/dev/null && [ "$(id -u)" -eq 0 ] || return 0
    local packages
    mapfile -t packages < <(missing "${DEBIAN[@]}")
    [ ${#packages[@]} -gt 0 ] || return 0
    export DEBIAN_FRONTEND=noninteractive
    local apt=(timeout "$LIMIT" apt-get -qq -o DPkg::Lock::Timeout=60)
    "${apt[@]}" update >/dev/null
    mapfile -t packages < <(known "${packages[@]}")
    [ ${#packages[@]} -gt 0 ] || return 0
    echo "installing ${packages[*]}"
    "${apt[@]}" install --yes --no-remove --no-install-recommends "${packages[@]}" >/dev/null
}

install_npm() { # for clients/node; buf among it, which checks the contracts
    command -v npm >/dev/null || return 0
    [ clients/node/node_modules/.package-lock.json -nt clients/node/package-lock.json ] && return 0
    echo "installing clients/node/node_modules"
    timeout "$LIMIT" npm --prefix clients/node ci --ignore-scripts --no-audit --no-fund \
        --loglevel=error
}

install_debian || echo "not all Debian packages are there: tests that need them are skipped"
install_npm || echo "not all npm packages are there: tests that need them are skipped"
exit 0
