#!/bin/bash
# Runs the tests of the kernels where AVX-512 is found: in Bochs, an emulator of a processor that has it (an i7-7800X), under a
# Linux of its own. Part of `ninja nightly`; some minutes. Debian's bochs, bochs-term, vgabios, isolinux, cpio and genisoimage
# are needed, and a kernel: KERNEL names it, or it is /boot/vmlinuz-*, or apt-get downloads one to build/avx512.
#
#   tests/avx512.sh [TEST...]     reduce and optim
set -u
cd "$(dirname "$0")/.." || exit 1

out=$PWD/build/avx512 isolinux=/usr/lib/ISOLINUX/isolinux.bin linker=/usr/lib/syslinux/modules/bios/ldlinux.c32
for tool in bochs genisoimage cpio $isolinux $linker; do
  command -v $tool >/dev/null || [ -r $tool ] || { echo "SKIP: $tool is missing" && exit 77; }
done
tests=${*:-reduce optim}
mkdir -p "$out/root" "$out/iso" && cd "$out" || exit 1

kernel=${KERNEL:-$(ls /boot/vmlinuz-* boot/vmlinuz-* 2>/dev/null | tail -n 1)}
if [ -z "$kernel" ]; then
  name=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: //p')
  apt-get download -q "$name" >apt.log 2>&1 && dpkg --fsys-tarfile "$name"_*.deb | tar x --wildcards './boot/vmlinuz-*' ||
    { echo "SKIP: no Linux kernel, and none to download" && exit 77; }
  kernel=$(ls boot/vmlinuz-* | tail -n 1)
fi

# The first and only process there: it runs the tests in turn and says how each ended.
cat >init.c <<'C'
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
  char tests[] = TESTS, *save = NULL, *t;
  for (t = strtok_r(tests, " ", &save); t != NULL; t = strtok_r(NULL, " ", &save)) {
    int status = -1;
    pid_t pid = fork();
    if (pid == 0) {
      execl(t, t, (char *)NULL);
      _exit(127);
    }
    waitpid(pid, &status, 0);
    printf("ended: %s %d\n", t, status);
  }
  printf("ended: all\n");
  fflush(stdout);
  for (;;) pause();
}
C
cc -static -Os -w -include string.h -DTESTS="\"$tests\"" init.c -o root/init || exit 1
# What Bochs 2.7 makes of the F16C instructions is not what processors do, so f16 goes the portable way.
mkdir -p src/tests/rooms src/tests/peers
sed 's/for (i = 0; i + 8 <= n; i += 8)/for (i = 0; i > n; i++)/' ../../cddp.h >src/cddp.h
cp ../../tests/*.h src/tests/
cp ../../tests/peers/*.h src/tests/peers/
for t in $tests; do
  sed 's/>= CDDP__ISA_BASE;/>= CDDP__ISA_AVX512;/' "../../tests/rooms/$t.c" >"src/tests/rooms/$t.c" # the others run everywhere
  cc -static -std=gnu11 -O2 -w "src/tests/rooms/$t.c" -o "root/$t" -lpthread -lm 2>"$t.log" || { cat "$t.log" && exit 1; }
done
(cd root && printf '%s\n' init $tests | cpio --quiet -o -H newc) >iso/initrd || exit 1
cp "$kernel" iso/vmlinuz && cp $isolinux $linker iso/ || exit 1
printf '%s\n' 'default linux' 'label linux' 'kernel vmlinuz' \
  'append initrd=initrd console=ttyS0 quiet mitigations=off nokaslr clearcpuid=xsaves,xsavec,aperfmperf' >iso/isolinux.cfg
genisoimage -quiet -o linux.iso -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table iso || exit 1

cat >bochsrc <<END
display_library: term
memory: guest=512, host=512
cpu: model=corei7_skylake_x, count=1, ips=100000000
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=$out/linux.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$out/serial
log: $out/bochs.log
panic: action=fatal
error: action=report
info: action=ignore
clock: sync=none
END

# Bochs draws its screen with curses, so it wants a terminal, and Debian's begins in its debugger: "c" lets it go on. What
# counts comes through the serial port.
rm -f serial
echo c >debugger
TERM=xterm timeout 1800 script -qec "bochs -q -f bochsrc -rc debugger" /dev/null </dev/null >bochs.out 2>&1 &
emulator=$!
trap 'kill $emulator 2>/dev/null' EXIT
until grep -q '^ended: all\|Kernel panic' serial 2>/dev/null || ! kill -0 $emulator 2>/dev/null; do sleep 1; done
kill $emulator 2>/dev/null
wait $emulator 2>/dev/null

failed=0 passed=0
for t in $tests; do
  if tr -d '\r' <serial | grep -qx "ended: $t 0" && [ "$(tr -d '\r' <serial | grep -cx AVX-512)" -gt $passed ]; then
    passed=$((passed + 1))
    echo "ok     $t: $(grep -a "^ok $t" serial)"
  else
    failed=$((failed + 1))
    echo "FAIL   $t: $out/serial ends in"
    tail -n 12 serial | cut -c 1-200 | sed 's/^/       | /'
  fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
