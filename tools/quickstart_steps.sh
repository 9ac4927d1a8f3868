# What both quickstarts say, and source from here: how long they will take, their steps, and how long each took.

# expect SECONDS, which all of it takes on two free cores: one thread of each of two ranks is at work nearly all the time.
# Cores are counted without the variables of OpenMP, which nproc obeys.
expect() {
    local load cores
    read -r load _ </proc/loadavg
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    awk -v seconds="$1" -v load="$load" -v cores="$cores" 'BEGIN {
        slower = (load + 2) / cores; if (slower < 1) slower = 1
        printf "some %.0f minutes on two free cores; %.1f of the %d here are busy: expect %.0f minutes\n", \
            seconds / 60, load, cores, seconds / 60 * slower
    }'
    echo "the lines of the training have an ETA of their own; what is complete is kept if it is stopped"
}

step() { printf '\n== %s\n' "$*"; SECONDS=0; }
took() { printf '   (%d s)\n' "$SECONDS"; }
