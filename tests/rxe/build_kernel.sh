#!/bin/bash
# build_kernel.sh [FILE]: builds the lab's kernel, once. About 12 minutes of one processor and 2 GB below FILE's folder while it
# works; the kernel itself has 9 MB. FILE is ~/.cache/adaptra/lab-linux if not given; nothing is done if it is there already.
#
# User-mode Linux from Debian's newest packaged kernel source, with soft-RoCE, the traffic shaper netem, and whatever lets it use
# this machine's files. Debian 12's own source is too old: its soft-RoCE knows no network namespaces, which are the lab's hosts.
# Needs root only where packages are missing: gcc make flex bison bc xz-utils.
set -euo pipefail
kernel=${1:-$HOME/.cache/adaptra/lab-linux}
if [[ -x $kernel ]]; then exit 0; fi
for tool in gcc make flex bison bc xz apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "build_kernel.sh: $tool is missing (gcc make flex bison bc xz-utils)" >&2; exit 1; }
done
mkdir -p "$(dirname "$kernel")"
work=$(mktemp -d "$kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# A package list of our own beside the machine's, from the mirror that the machine already uses.
mkdir -p lists/partial cache/archives/partial
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -v security | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie-backports main" >sources
cat >apt.conf <<CONF
Dir::Etc::SourceList "$work/sources";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$work/lists";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
CONF
export APT_CONFIG=$work/apt.conf
apt-get update -qq
package=$(apt-cache pkgnames linux-source- | grep -E '^linux-source-[0-9.]+$' | sort -V | tail -n 1)
[[ -n $package ]] || { echo "build_kernel.sh: $mirror has no package linux-source" >&2; exit 1; }
apt-get download -qq "$package"
dpkg-deb --extract "$package"_*.deb unpacked
mkdir source
tar --extract --file unpacked/usr/src/linux-source-*.tar.xz --directory source --strip-components=1
rm -rf unpacked ./*.deb

wanted=(
  STATIC_LINK SMP HIGH_RES_TIMERS NO_HZ_IDLE MAGIC_SYSRQ NULL_CHAN STDERR_CONSOLE  # a process that ends by itself
  HOSTFS OVERLAY_FS TMPFS DEVTMPFS MEMFD_CREATE                                    # the machine's files
  NET PACKET UNIX INET IPV6 NAMESPACES NET_NS NETDEVICES NET_CORE VETH BRIDGE      # hosts and cables
  NET_SCHED NET_SCH_NETEM NET_SCH_TBF                                              # delay, loss, rate
  UML_PCI_OVER_VFIO INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_ADDR_TRANS RDMA_RXE  # RDMA is offered where PCI could be
)
make --silent -C source ARCH=um defconfig
source/scripts/config --file source/.config --disable MODULES --set-val NR_CPUS 4
for option in "${wanted[@]}"; do source/scripts/config --file source/.config --enable "$option"; done
make --silent -C source ARCH=um olddefconfig
for option in "${wanted[@]}"; do
  grep -q "^CONFIG_$option=y" source/.config || { echo "build_kernel.sh: $package refuses CONFIG_$option" >&2; exit 1; }
done
make --silent -C source ARCH=um -j"$(nproc)" linux
strip --strip-all source/linux
mv source/linux "$kernel"
