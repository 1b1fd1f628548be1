# Sourced by hostfile.sh. `quote WORD` prints it so that a bash at the other end of ssh, after DeepSpeed and pdsh have put
# it into a command line unquoted, makes the same word of it: words of other than plain characters become $'\x..' bytes.
quote() {
  case $1 in
    "" | *[!A-Za-z0-9_@+=:,./-]*) printf "\$'%s'" "$(printf %s "$1" | od -An -v -tx1 | tr -d '\n' | sed 's/ /\\x/g')" ;;
    *) printf %s "$1" ;;
  esac
}
