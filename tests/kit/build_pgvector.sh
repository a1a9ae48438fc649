#!/usr/bin/env bash
# Make a folder with the PostgreSQL of this machine's Debian packages and pgvector of Debian 13's
# source package. PostgreSQL finds its files relative to its programs, so no root is needed.
#   usage: build_pgvector.sh FOLDER
# Needs postgresql, gcc, dpkg-dev and a Debian mirror that apt knows. About half a minute.
set -euo pipefail

into=${1:?usage: build_pgvector.sh FOLDER}
[ -e "$into/ready" ] && exit 0
version=$(ls /usr/lib/postgresql | sort -V | tail -n 1)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial"

# The mirror that this machine's apt already uses, with its keyring.
. /etc/os-release
[ "$ID" = debian ] || { echo "pgvector's source is asked of a Debian mirror; this is $ID" >&2; exit 1; }
shopt -s nullglob
stanzas=(/etc/apt/sources.list.d/*.sources)
lists=(/etc/apt/sources.list /etc/apt/sources.list.d/*.list)
sources=$work/mirror.sources
if [ ${#stanzas[@]} -gt 0 ]; then
    awk -v suite="$VERSION_CODENAME" 'BEGIN { RS = "" } $0 ~ "Suites:[^\n]*[ \t]" suite "([ \t\n]|$)" { print; exit }' \
        "${stanzas[@]}" | grep -v '^#' > "$work/stanza" || true
    if [ -s "$work/stanza" ]; then
        {
            sed "s/^Types:.*/Types: deb/; s/^Suites:.*/Suites: $VERSION_CODENAME/; s/^Components:.*/Components: main/" "$work/stanza"
            echo
            sed 's/^Types:.*/Types: deb-src/; s/^Suites:.*/Suites: trixie/; s/^Components:.*/Components: main/' "$work/stanza"
        } > "$sources"
    fi
fi
if [ ! -s "$sources" ]; then
    sources=$work/mirror.list
    { cat "${lists[@]}" 2>/dev/null || true; } |
        sed -nE "s/^deb(\s+\[[^]]*\])?\s+(\S+)\s+$VERSION_CODENAME\s.*/deb\1 \2 $VERSION_CODENAME main\ndeb-src\1 \2 trixie main/p" |
        awk 'NR <= 2' > "$sources"
fi
[ -s "$sources" ] || { echo "no Debian mirror for $VERSION_CODENAME in apt's sources" >&2; exit 1; }
apt_options=(-o Dir::Etc::sourcelist="$sources" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::Lists="$work/lists" -o APT::Sandbox::User=root)
cd "$work"
apt-get "${apt_options[@]}" update -qq
apt-get "${apt_options[@]}" source --download-only -qq pgvector
apt-get "${apt_options[@]}" download -qq "postgresql-server-dev-$version"
# apt has checked the files against the mirror's signature.
dpkg-source --no-check -x pgvector_*.dsc pgvector > /dev/null
dpkg -x "postgresql-server-dev-$version"_*.deb headers

program=$into/usr/lib/postgresql/$version
data=$into/usr/share/postgresql/$version
mkdir -p "$(dirname "$program")" "$(dirname "$data")"
cp -r "/usr/lib/postgresql/$version" "$program"
cp -r "/usr/share/postgresql/$version" "$data"

cd pgvector
gcc -O2 -ftree-vectorize -fassociative-math -fno-signed-zeros -fno-trapping-math -fPIC -shared -w \
    -I "$work/headers/usr/include/postgresql/$version/server" -I /usr/include/postgresql/"$version"/server \
    src/*.c -o "$program/lib/vector.so" -lm
extension=$(sed -nE "s/^default_version = '(.*)'/\1/p" vector.control)
cp vector.control sql/vector--*--*.sql "$data/extension/"
cp sql/vector.sql "$data/extension/vector--$extension.sql"
chmod -R a+rX "$into"
echo "$program/bin" > "$into/ready"
