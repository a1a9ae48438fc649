#!/usr/bin/env bash
# Build the Kubernetes of Debian 12's source package into a folder: API server, controller manager,
# scheduler, kubelet and kube-proxy. About five minutes on two cores, once per machine.
#   usage: build_kubernetes.sh FOLDER
# Needs golang-go, dpkg-dev, gcc, make, jq, rsync and a Debian mirror that apt knows.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
into=${1:?usage: build_kubernetes.sh FOLDER}
[ -x "$into/kube-proxy" ] && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/home"

# The mirror that this machine's apt already uses, with its keyring, for the sources of Debian 12.
. /etc/os-release
[ "$ID" = debian ] || { echo "the sources of Debian 12 are asked of a Debian mirror; this is $ID" >&2; exit 1; }
shopt -s nullglob
stanzas=(/etc/apt/sources.list.d/*.sources)
lists=(/etc/apt/sources.list /etc/apt/sources.list.d/*.list)
if [ ${#stanzas[@]} -gt 0 ]; then
    awk -v suite="$VERSION_CODENAME" 'BEGIN { RS = "" } $0 ~ "Suites:[^\n]*[ \t]" suite "([ \t\n]|$)" { print; exit }' \
        "${stanzas[@]}" | grep -v '^#' |
        sed 's/^Types:.*/Types: deb-src/; s/^Suites:.*/Suites: bookworm/; s/^Components:.*/Components: main/' \
            > "$work/mirror.sources"
fi
sources=$work/mirror.sources
if [ ! -s "$sources" ]; then
    sources=$work/mirror.list
    { cat "${lists[@]}" 2>/dev/null || true; } |
        sed -nE "s/^deb(\s+\[[^]]*\])?\s+(\S+)\s+$VERSION_CODENAME\s.*/deb-src\1 \2 bookworm main/p" |
        awk 'NR == 1' > "$sources"
fi
[ -s "$sources" ] || { echo "no Debian mirror for $VERSION_CODENAME in apt's sources" >&2; exit 1; }
apt_options=(-o Dir::Etc::sourcelist="$sources" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::Lists="$work/lists" -o APT::Sandbox::User=root)
cd "$work"
apt-get "${apt_options[@]}" update -qq
apt-get "${apt_options[@]}" source --download-only -qq kubernetes
# apt has checked the files against the mirror's signature.
dpkg-source --no-check -x kubernetes_*.dsc tree > /dev/null

cd tree
patch --quiet -p1 < "$here/reflect2.patch"
HOME="$work/home" GO111MODULE=off CGO_ENABLED=0 \
    KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 KUBE_GIT_TREE_STATE=clean \
    KUBE_GIT_COMMIT=0000000000000000000000000000000000000000 \
    make GOLDFLAGS="-s -w" WHAT="cmd/kube-apiserver cmd/kube-controller-manager cmd/kube-scheduler cmd/kubelet cmd/kube-proxy"

mkdir -p "$into"
# Moved one by one with the one that is looked for last, so that half a build is never taken for one.
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
    install "_output/local/bin/linux/amd64/$name" "$into/.$name" && mv "$into/.$name" "$into/$name"
done
