#!/bin/bash
# The first process of the lab's kernel. The kernel sees this machine's files read-only (hostfs); what is written lands in memory,
# except below the exchange folder, which both sides share. The kernel's command line says where that is, and how large the lab is:
#   lab_exchange=DIR lab_hosts=N lab_rails=R
# The folder has the script to run, `payload`; this leaves `output` and `status` there, and then ends the kernel.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
trap 'echo o > /proc/sysrq-trigger; read -r' EXIT
mount -t proc proc /proc
for word in $(</proc/cmdline); do
  case $word in lab_*=*) declare "$word" ;; esac
done

mount -t tmpfs -o size=60% memory /mnt
mkdir /mnt/changed /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/changed,workdir=/mnt/work overlay /mnt/root || exit
cd /mnt/root || exit
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t devtmpfs devtmpfs dev
mkdir -p dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts devpts dev/pts
mount -t tmpfs tmpfs run
for name in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do ln -sfn "/proc/self/${name#*:}" "dev/${name%%:*}"; done
mkdir -p "./$lab_exchange"
mount -t hostfs -o "$lab_exchange" exchange "./$lab_exchange" || exit

chroot . /bin/bash "$lab_exchange/hosts.sh" "$lab_hosts" "$lab_rails" >"./$lab_exchange/hosts.log" 2>&1 &&
  chroot . /bin/bash "$lab_exchange/payload" </dev/null >"./$lab_exchange/output" 2>&1
echo $? >"./$lab_exchange/status.part"
mv "./$lab_exchange/status.part" "./$lab_exchange/status"
