//! Reads what a job is made from and collects everything that is wrong with it, without sending anything.

use std::path::{Path, PathBuf};

use agent_jobfile::yaml::Place;
use agent_jobfile::{self as jobfile, Misread, Refused};
use agent_model::{Fault, JobDraft};

use super::plan::Wrong;
use super::{Changes, Plan, Remark, Source, pipeline};

/// What is wrong: in a place of a file if that is known, else the text says where.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    pub(crate) code: &'static str,
    pub(crate) file: Option<PathBuf>,
    pub(crate) place: Option<Place>,
    pub(crate) message: String,
    pub(crate) fix: Option<String>,
}

impl From<Fault> for Mistake {
    fn from(fault: Fault) -> Mistake {
        let message = fault.line();
        Mistake { code: fault.code.as_str(), file: None, place: None, message, fix: fault.fix }
    }
}

/// What was found out about a target.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    pub(crate) mistakes: Vec<Mistake>,
    pub(crate) warnings: Vec<Remark>,
}

/// Everything about `target` that can be known without a daemon.
pub(crate) fn check(target: &Path) -> Findings {
    let changes = Changes::default();
    let source = match Source::find(target, &changes) {
        Ok(source) => source,
        Err(fault) => return Findings::of(fault.into()),
    };
    let mut findings = Findings::default();
    for (file, refused) in read(&source) {
        let of = |mistake: &jobfile::Rejection| Mistake {
            code: mistake.code.as_str(),
            file: Some(file.clone()),
            place: Some(mistake.at.place),
            message: mistake.at.message.clone(),
            fix: mistake.fix.clone(),
        };
        findings.mistakes.extend(refused.mistakes.iter().map(of));
        findings.warnings.extend(refused.warnings.into_iter().map(|warning| Remark::at(&file, warning)));
    }
    if !findings.mistakes.is_empty() {
        return findings;
    }
    // The document is in order; what is left are the files that it names, and rules about the whole.
    match Plan::of(&source, changes) {
        Err(wrong) => Findings::of(wrong),
        Ok(plan) => {
            // The rules ask which inputs there are, not what is in them.
            let whole = plan.stand_in().and_then(JobDraft::validate);
            Findings {
                mistakes: whole.err().map(Mistake::from).into_iter().collect(),
                warnings: plan.warnings,
            }
        }
    }
}

impl Findings {
    fn of(Wrong { faults, warnings }: Wrong) -> Findings {
        Findings { mistakes: faults.into_iter().map(Mistake::from).collect(), warnings }
    }
}

/// The mistakes of the document itself, and of the components of a pipeline. A file that cannot be read is left to who reads all of them.
fn read(source: &Source) -> Vec<(PathBuf, Refused)> {
    let (file, folder) = match source {
        Source::Job(file) => (file, None),
        Source::Runconfig { file, folder, .. } => (file, Some(*folder)),
        Source::Script { dir, name, .. } => {
            let file = dir.join(name);
            let refused =
                super::read_text(&file).ok().and_then(|text| jobfile::batch_script(&text, name).err());
            return refused.map(|refused| (file, refused)).into_iter().collect();
        }
        Source::Directory(_) => return Vec::new(),
    };
    let Ok(text) = super::read_text(file) else { return Vec::new() };
    if folder.is_none() && jobfile::is_pipeline(&text) {
        let base = file.parent().unwrap_or(Path::new(""));
        let of_file = |Misread { file: component, refused }| {
            (component.map_or_else(|| file.clone(), |component| base.join(component)), refused)
        };
        return pipeline::parse(file, &text, &[]).err().into_iter().flatten().map(of_file).collect();
    }
    let read = match folder {
        None => jobfile::command_job(&text, &[])
            .and_then(|job| jobfile::Warning::without_slips(job.warnings).map(drop)),
        Some(folder) => jobfile::runconfig(&text, &[], folder).map(drop),
    };
    read.err().map(|refused| (file.clone(), refused)).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::project;
    use super::*;

    #[test]
    fn test_mistakes_of_a_document_have_places_and_those_of_its_files_say_where_they_are() {
        let dir = project(&[
            ("job.yml", "command: x\nlimits: {timeout: soon}\nresources: {gpus: two}\nretrys: 2\n"),
            (
                "p/.azureml/a.runconfig",
                "script: t.py\nenvironment: {python: {condaDependenciesFile: no.yml}}\n",
            ),
            ("p/t.py", ""),
            (
                "gone.yml",
                "command: x ${{inputs.d}}\ncode: gone-code\nfoo: 1\ninputs: {d: {path: gone-data}}\nenvironment: {requirements: gone.txt}\n",
            ),
            ("q/.azureml/a.runconfig", "script: gone.py\nenvironment: {name: e}\n"),
            ("s.sh", "#!/bin/bash\n#SBATCH --time=soon --mem=lots\ntrue\n"),
            ("ok.yml", "command: x ${{inputs.d}}\ncode: .\nfoo: 1\ninputs: {d: {path: p}}\n"),
        ]);
        let found = check(dir.path());
        let places: Vec<_> = found.mistakes.iter().map(|mistake| mistake.place.unwrap().line).collect();
        assert_eq!(places, [2, 3]);
        assert_eq!(found.mistakes[0].code, "JOB-102");
        assert!(found.warnings[0].message.contains("did you mean `retry`"), "{found:?}");
        let found = check(&dir.path().join("s.sh"));
        let columns: Vec<_> = found.mistakes.iter().map(|mistake| mistake.place.unwrap().column).collect();
        assert_eq!(columns, [9, 21], "{found:?}");
        let found = check(&dir.path().join("p"));
        assert!(found.mistakes[0].message.contains("no.yml` cannot be read"), "{found:?}");
        let found = check(&dir.path().join("gone.yml"));
        let named = ["gone-data", "gone-code", "gone.txt"].iter().zip(&found.mistakes);
        assert_eq!(named.filter(|(name, mistake)| mistake.message.contains(*name)).count(), 3, "{found:?}");
        assert!(found.warnings[0].message.contains("`foo` is not known"), "{found:?}");
        let found = check(&dir.path().join("q"));
        assert!(found.mistakes[0].message.contains("line 1, column 9: `script`"), "{found:?}");
        let found = check(&dir.path().join("ok.yml"));
        assert_eq!((found.mistakes.len(), found.warnings.len()), (0, 1));
        assert!(
            found.warnings[0]
                .to_string()
                .ends_with("ok.yml: line 3, column 1: `foo` is not known and has no effect")
        );
        assert_eq!(check(&dir.path().join("nothing")).mistakes[0].code, "JOB-101");
    }
}
