# Counts test cases in ctest's JUnit file: prints "PASSED FAILED SKIPPED", then a line "skipped: ..." with the
# reason for each case that was skipped, then a line "failed: ..." for each that failed, and under it, further in,
# the end of what it printed.
#
# One ctest entry is a program of many cases (GoogleTest) or a file of many (bats); a program of another
# kind is one case. An entry that failed without naming a case, as by a crash or a time-out, is one that
# failed; so is one whose program is not there.

/<testcase name="/ {
  name = attribute("name")
  status = attribute("status")
  reason = ""
  cases = bad = lines = said_by_bats = 0
}

/<skipped message="/ { reason = attribute("message") }

{ sub(/^[ \t]*<system-out>/, "") }

# What a case prints stands before its end in GoogleTest, and after it in bats.
!/^\t*<.*>$/ { line[++lines] = $0 }
said_by_bats && !/^#/ { report(1); said_by_bats = 0 }

# GoogleTest's lines end in the time taken; its summary repeats the names without it.
/^\[       OK \] .* \([0-9]+ ms\)$/ { passed++; cases++ }
/^\[ RUN      \] / { lines = 0 }
/^\[  FAILED  \] .* \([0-9]+ ms\)$/ { failed++; cases++; bad++; failure($4); report(1) }
/^\[  SKIPPED \] .* \([0-9]+ ms\)$/ { cases++; skip($4, said) }
# GTEST_SKIP() prints "file:line: Skipped" and the reason on the next line.
take { said = $0; take = 0 }
/^\[ RUN      \] / { said = "" }
/: Skipped$/ { take = 1 }

# bats: TAP.
/^ok [0-9]+ / {
  cases++
  at = index($0, " # skip")
  if (at == 0) {
    passed++
  } else {
    why = substr($0, at + 7)
    gsub(/^[ (]+|\)$/, "", why)
    what = substr($0, 1, at - 1)
    sub(/^ok [0-9]+ /, "", what)
    skip(what, why)
  }
}
/^not ok [0-9]+ / {
  failed++; cases++; bad++
  failure(substr($0, 8))
  lines = 0
  said_by_bats = 1
}

/<\/testcase>/ {
  if (status == "fail") {
    if (bad == 0) {
      failed++
      failure("")
      report(0)
    }
  } else if (status == "disabled") {
    skip("", "disabled")
  } else if (status == "notrun") {
    if (reason ~ /^SKIP_/) skip("", reason)
    else {
      failed++
      failure("it was not run")
    }
  } else if (cases == 0) {
    passed++
  }
}

function attribute(key,    text) {
  text = $0
  if (!sub(".* " key "=\"", "", text)) sub(".*" key "=\"", "", text)
  sub(/".*/, "", text)
  return text
}

function skip(what, why) {
  skipped++
  notes[++n] = "skipped: " name (what == "" ? "" : ": " what) (why == "" ? "" : ": " why)
}

function failure(what) { failures[++m] = "failed: " name (what == "" ? "" : ": " what) }

# The last lines that were held, but for `without` of them.
function report(without,    i, text) {
  for (i = lines - without > 25 ? lines - without - 24 : 1; i <= lines - without; i++) {
    text = line[i]
    gsub(/&lt;/, "<", text); gsub(/&gt;/, ">", text); gsub(/&quot;/, "\"", text); gsub(/&amp;/, "\\&", text)
    failures[++m] = "  " substr(text, 1, 400)
  }
  lines = 0
}

END {
  print passed + 0, failed + 0, skipped + 0
  for (i = 1; i <= n; i++) print notes[i]
  for (i = 1; i <= m; i++) print failures[i]
}
