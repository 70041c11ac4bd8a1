#!/bin/sh
# usage: enter.sh FOLDER NAME COMMAND...   (in a mount, UTS and network namespace of its own)
# Makes this mount namespace look like the machine NAME and runs COMMAND in it.
set -e
folder=$1 name=$2
shift 2
for file in passwd group shadow hosts hostname sudoers; do
  [ ! -e "/etc/$file" ] || mount --bind "$folder/etc/$file" "/etc/$file"
done
[ ! -d /etc/sudoers.d ] || mount --bind "$folder/sudoers.d" /etc/sudoers.d
# The containers bind /usr with shifted ids, which the kernel refuses where something is mounted below it: so they get a
# /usr of their own, and only then pct goes where Proxmox's PATH finds it.
mount --bind /usr "$folder/usr"
mount --bind "$folder/sbin" /usr/local/sbin
mount --bind "$folder/run" /run
hostname "$name"
cd /
exec "$@"
