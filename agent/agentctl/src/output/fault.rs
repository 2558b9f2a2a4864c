//! Renders faults for people.

use agent_model::{Blame, Code, Fault};

use super::Paper;
use super::text::{Tone, clean, without_numbers, wrap};

/// `error[CODE]: what`, then why and what to do.
pub(crate) fn render(fault: &Fault, paper: Paper) -> String {
    let mut text = headed(&format!("error[{}]:", fault.code), &fault.what, paper);
    for (index, cause) in fault.why.iter().enumerate() {
        text.push_str(&labelled(if index == 0 { "why:" } else { "" }, cause, Tone::Plain, paper));
    }
    let explain = format!("`agentctl explain {}` tells more", fault.code);
    text.push_str(&labelled("fix:", fault.fix.as_ref().unwrap_or(&explain), Tone::Good, paper));
    if fault.code == Code::Bug {
        let report = "please report it with the output of `agentctl doctor`";
        text.push_str(&labelled("", report, Tone::Plain, paper));
    }
    text
}

/// A refusal of this program itself.
pub(crate) fn render_refusal(what: &str, fix: &str, paper: Paper) -> String {
    headed("error:", what, paper) + &labelled("fix:", fix, Tone::Good, paper)
}

fn headed(head: &str, what: &str, paper: Paper) -> String {
    let line = wrap(&format!("{head} {}", clean(&without_numbers(what))), paper.width, 2);
    line.replacen(head, &paper.ink.paint(Tone::Bad, head), 1) + "\n"
}

/// Who has to act.
pub(crate) fn blamed(blame: Blame) -> &'static str {
    match blame {
        Blame::User => "the job, its files or its settings",
        Blame::Node => "the machine it ran on",
        Blame::Platform => "agentd itself",
        Blame::Network => "the network",
    }
}

fn labelled(label: &str, value: &str, tone: Tone, paper: Paper) -> String {
    let label = format!("{label:<4}");
    // A cause may be the last lines of a log; each stays a line of its own.
    let value = without_numbers(value);
    let lines: Vec<String> = value.lines().map(|line| wrap(&clean(line), paper.width, 7)).collect();
    format!("  {} {}\n", paper.ink.paint(tone, &label), lines.join("\n       "))
}

#[cfg(test)]
mod tests {
    use super::super::text::Ink;
    use super::*;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 50 };

    #[test]
    fn test_fault_says_what_why_and_what_to_do() {
        let fault = Fault::new(Code::EnvUnsatisfied, "could not build the environment")
            .why("no version of `torch` satisfies `>=9`\nERROR: No matching distribution")
            .why("pip ended with code 1")
            .fix("relax `torch` in requirements.txt, or ask for another Python");
        insta::assert_snapshot!(render(&fault, PAPER), @r"
            error[ENV-103]: could not build the environment
              why: no version of `torch` satisfies `>=9`
                   ERROR: No matching distribution
                   pip ended with code 1
              fix: relax `torch` in requirements.txt, or ask
                   for another Python
        ");
    }

    #[test]
    fn test_fault_without_a_fix_names_its_page() {
        let text = render(&Fault::new(Code::Bug, "odd\x1b[2J"), PAPER);
        insta::assert_snapshot!(text, @r"
            error[BUG-001]: odd\u{1b}[2J
              fix: `agentctl explain BUG-001` tells more
                   please report it with the output of
                   `agentctl doctor`
        ");
    }

    #[test]
    fn test_refusal_has_a_way_out() {
        insta::assert_snapshot!(render_refusal("`out` exists", "use --force", PAPER), @r"
            error: `out` exists
              fix: use --force
        ");
    }
}
