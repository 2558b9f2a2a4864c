//! Where groups can be made: the hierarchies that are mounted, and where in them this process is.

use std::fs;
use std::path::{Path, PathBuf};

use super::SCOPE_PREFIX;
use super::devices;
use crate::record::{CgroupRequest, Controller, Launch};

/// A group of one hierarchy below which the job's is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPlace {
    /// Its path in the file system.
    pub parent: PathBuf,
    /// It is of version 2.
    pub v2: bool,
    /// It is a scope that was made for this job alone.
    pub scope: bool,
}

/// Where the groups of a job are made, of which some may turn out not to be possible.
pub fn places(request: &CgroupRequest) -> Vec<GroupPlace> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    choose(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"), request)
}

/// The same for a job that must not open these nodes: also in the hierarchy of devices of version 1, where no program can
/// keep it from them.
pub fn places_of(launch: &Launch) -> Vec<GroupPlace> {
    let mut places = places(&launch.cgroup.clone().unwrap_or_default());
    if !launch.denied.is_empty() && devices::try_out().is_err() {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let place = place_of_devices(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
        let is_new = |place: &GroupPlace| places.iter().all(|other| other.parent != place.parent);
        places.extend(place.filter(is_new));
    }
    places
}

/// The hierarchy that decides about devices in version 1.
pub fn place_of_devices(own: &str, mounts: &str) -> Option<GroupPlace> {
    const DEVICES: &str = "devices";
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let has = fields.next()?.split(',').any(|controller| controller == DEVICES);
        fields.next().filter(|_| has)
    })?;
    let parent = mounts.lines().find_map(|mount| Mount::parse(mount)?.dir_of(DEVICES, path))?;
    Some(GroupPlace { parent, v2: false, scope: false })
}

/// One line for each hierarchy this process is in, and one for each mount.
pub(super) fn choose(own: &str, mounts: &str, request: &CgroupRequest) -> Vec<GroupPlace> {
    let mut places: Vec<GroupPlace> = own.lines().filter_map(|line| place(line, mounts, request)).collect();
    // One hierarchy may carry several controllers, and be mounted more than once.
    places.sort_by(|a, b| (b.v2, &a.parent).cmp(&(a.v2, &b.parent)));
    places.dedup();
    places
}

/// The place of a line `number:controllers:path`.
fn place(line: &str, mounts: &str, request: &CgroupRequest) -> Option<GroupPlace> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let v2 = controllers.is_empty();
    let wanted = |controller: &str| {
        let controller = match controller {
            "" => Controller::Unified,
            "memory" => Controller::Memory,
            "pids" => Controller::Pids,
            "freezer" => Controller::Freezer,
            _ => return false,
        };
        !request.without.contains(&controller)
    };
    let controller = controllers.split(',').find(|controller| wanted(controller))?;
    if v2 && let Some(root) = &request.root {
        return Some(GroupPlace { parent: root.clone(), v2, scope: false });
    }
    let parent = mounts.lines().find_map(|mount| Mount::parse(mount)?.dir_of(controller, path))?;
    let last = parent.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let scope = last.starts_with(SCOPE_PREFIX) && last.ends_with(".scope");
    Some(GroupPlace { parent, v2, scope })
}

/// One mount of a hierarchy.
struct Mount<'a> {
    /// What part of the hierarchy is mounted.
    root: &'a str,
    at: &'a str,
    /// `cgroup` or `cgroup2`.
    kind: &'a str,
    options: &'a str,
}

impl Mount<'_> {
    /// From a line of `mountinfo`; the fields before ` - ` are more or fewer.
    fn parse(line: &str) -> Option<Mount<'_>> {
        let (of_mount, of_system) = line.split_once(" - ")?;
        let mut of_mount = of_mount.split(' ').skip(3);
        let mut of_system = of_system.split(' ');
        let mount = Mount {
            root: of_mount.next()?,
            at: of_mount.next()?,
            kind: of_system.next()?,
            options: of_system.nth(1).unwrap_or_default(),
        };
        mount.kind.starts_with("cgroup").then_some(mount)
    }

    /// Where the group `path` of the hierarchy with `controller` is, if it is this one and shows it.
    fn dir_of(&self, controller: &str, path: &str) -> Option<PathBuf> {
        let is_it = match self.kind {
            "cgroup2" => controller.is_empty(),
            _ => !controller.is_empty() && self.options.split(',').any(|option| option == controller),
        };
        if !is_it || path.contains("/..") {
            return None; // outside of what this process may see
        }
        let below = Path::new(path).strip_prefix(self.root).ok()?;
        let at = PathBuf::from(unescaped(self.at));
        Some(if below.as_os_str().is_empty() { at } else { at.join(below) })
    }
}

/// Blanks and backslashes are written as three octal digits.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (code, text)| path.replace(code, text))
}

/// Whether this process can keep those that it starts from nodes.
pub fn can_deny() -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let unified = || places(&CgroupRequest::default()).iter().any(|place| place.v2);
    let by_controller = || {
        let place = place_of_devices(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
        place.is_some_and(|place| rustix::fs::access(&place.parent, rustix::fs::Access::WRITE_OK).is_ok())
    };
    unified() && devices::try_out().is_ok() || by_controller()
}
